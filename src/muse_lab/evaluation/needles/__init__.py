"""Code needle-in-a-haystack: uids that are defined far back in a repository."""
