"""The executor's path on a GPU: compiled kernels, state that lives on the device, steps launched ahead."""
