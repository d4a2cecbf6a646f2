"""The one base of every error that a user can cause: what was found, what was expected, and the mend."""


class UserError(ValueError):
    """Something a user can get wrong. The command line prints its message without a traceback and exits with
    `status`.
    """

    status = 1
    word = "error"
    """What the message is announced as; nothing is printed where there is no message."""
