"""Native code: C++ compiled on this machine when it is first needed, for this machine's processor."""

from memory.native.build import NativeError, native_library, switched_off

__all__ = ["NativeError", "native_library", "switched_off"]
