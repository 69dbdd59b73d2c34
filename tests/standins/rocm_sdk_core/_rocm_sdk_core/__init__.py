"""The SDK: programs and the libraries below HIP."""
