"""Sources and binaries that modules are made from."""
