"""What tasks with labelled texts share, whatever is labelled: encoders of words, training, scores, results."""
