"""The embedded engine: token ids in, token ids out, on one machine's CPU, with torch.

Knows no words (the gateway owns those), no HTTP (the worker owns that) and no files but weights and adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.engine.engine import Engine
    from serve.engine.settings import EngineSettings


def load_engine(settings: EngineSettings) -> Engine:
    """Loads the model that `settings` names and starts its engine thread. Close the engine when done with it.

    Raises `UnsupportedModel` for a model this engine does not compute exactly, `WeightsError` for a damaged folder.
    """
    from serve.engine.engine import Engine  # brings torch: settings are read by processes that must start without it

    return Engine.load(settings)
