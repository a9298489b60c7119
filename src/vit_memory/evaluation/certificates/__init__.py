"""Certificates of non-interference: the checks of `noninterference` for given tasks and images, in a file to keep."""
