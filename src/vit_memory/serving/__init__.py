"""A server for trained tasks: every task answers in one pass, and tasks come and go while it runs."""
