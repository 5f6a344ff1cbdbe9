#!/bin/sh
# Makes the picture and the figures of this page: sh make.sh FOLDER, a new one for tables and pictures. Run again, it
# goes on where it was stopped.
set -e
mkdir -p "$1"
fastrnn probe agreement --cell rnn,gru,lstm --json "$1/agreement.json" --plot "$1/agreement.png"
