"""The common part of all models of text: text, vocabularies, cells, checkpoints, progress, plain errors."""
