"""Predictions and metrics of tasks on many images, and the checks of `vit-memory verify`."""
