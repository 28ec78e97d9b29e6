"""The door to C++: only files of this folder call the native library, with arguments that were checked."""
