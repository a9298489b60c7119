"""Training: any number of settings on one pass of a frozen backbone."""
