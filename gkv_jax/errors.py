"""The errors that users are meant to read."""


class UserError(ValueError):
    """A request, file or option that cannot be served.

    The message is one line that names the field and the way out; command lines print it and exit
    with code 2, the server answers HTTP 400 with it, and nothing else in the batch is disturbed.
    """


class PromptTooLongError(UserError):
    """The prompt does not fit the model or the cache policy."""


class EngineClosedError(RuntimeError):
    """The engine was closed before the request was done."""


class EngineFailedError(EngineClosedError):
    """The engine's thread failed, by no fault of the request; ``__cause__`` says how."""
