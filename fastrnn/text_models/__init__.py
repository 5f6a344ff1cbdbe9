"""What models of text share, whatever they predict: text, vocabularies, cells, checkpoints, progress, plain errors."""
