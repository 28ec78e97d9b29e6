"""Export to other runtimes: files that run without this package. Stored codes are exported exactly, or rejected."""
