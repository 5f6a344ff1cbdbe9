"""The common part of tasks with labelled texts: encoders of words, training, scores, results."""
