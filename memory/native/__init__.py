"""Native code: C++ compiled on this machine when it is first needed, for this machine's processor."""

from memory.native.build import SWITCH, NativeError, native_library, switched_off

__all__ = ["SWITCH", "NativeError", "native_library", "switched_off"]
