"""Why a demo could not go on."""


class DemoError(RuntimeError):
    """The demo could not go on; the message says why."""
