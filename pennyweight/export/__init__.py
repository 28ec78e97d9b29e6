"""Models for other runtimes: files that run without this package. What is exported is what is stored, or refused."""
