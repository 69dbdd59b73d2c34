"""Tables of torch's tests."""
