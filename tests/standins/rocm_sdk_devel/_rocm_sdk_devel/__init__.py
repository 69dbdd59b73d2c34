"""The SDK's development files."""
