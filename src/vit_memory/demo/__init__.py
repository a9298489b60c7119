"""The demo: three tasks on one frozen backbone, trained on generated images, with a page of results."""
