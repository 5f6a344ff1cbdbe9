#!/bin/sh
# Makes the pictures and the figures of these pages: sh make.sh FOLDER INPUT. FOLDER is a new one, for tables and
# pictures; INPUT is tinyshakespeare's input.txt. Run again, it continues where it stopped: what FOLDER already
# holds is not made again.
set -e
mkdir -p "$1"
input=$(realpath "$2")
library=$(python3 -c 'import os; print(os.path.dirname(os.__file__))')
cd "$1"

once() { # the picture, and the command that draws it
    picture=$1
    shift
    test -e "$picture" || "$@" --plot "$picture"
}

once gradients.png fastrnn probe gradients --cell rnn,gru,lstm --json gradients.json
once exploding.png fastrnn probe gradients --cell rnn --radius 1.5 --both-clips --optimizer sgd --learning-rate 1 \
    --steps 200 --json exploding.json
once anbn.png fastrnn probe counting --cell gru,lstm --json anbn.json
once anbncn.png fastrnn probe counting --language anbncn --cell lstm --steps 16000 --json anbncn.json
for task in copy adding; do
    once $task.png fastrnn probe distance --task $task --hidden 32 --batch 16 --learning-rate 0.005 --steps 1000 \
        --json $task.json
done
once language_models.png fastrnn lm train "$input" --out large --cell rnn,gru,lstm --embedding 64 --dropout 0.1 \
    --json language_models.json
tail -c 111540 "$input" > held.txt # the tenth that lm train holds out
small="--hidden 128 --batch 12 --window 50 --learning-rate 0.004 --epochs 2 --ngrams 0"
test -e cells_prose.png || fastrnn lm train "$input" --out lm $small
once cells_prose.png fastrnn probe cells held.txt --model lm --property position,beginning --lines 10
test -e cells.png || fastrnn lm train "$library/[a-k]*.py" --out code $small
once cells.png fastrnn probe cells "$library/[l-z]*.py" --model code --property beginning,quotes,comments --lines 8
once agreement.png fastrnn probe agreement --cell rnn,gru,lstm --json agreement.json
times # user and system time: of the shell, and below it of the commands
