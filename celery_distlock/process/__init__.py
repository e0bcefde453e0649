"""Per-process resources: background threads, fork safety and cleanup at exit."""
