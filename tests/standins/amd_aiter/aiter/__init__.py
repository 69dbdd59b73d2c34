"""aiter, without any operator."""
