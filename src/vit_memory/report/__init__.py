"""One self-contained HTML page about tasks: their scores, their mistakes, and the training they come from."""
