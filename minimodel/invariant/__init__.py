"""Batch-invariant kernels (attention, linear), and the checks that allow them their fixed shapes on a device."""
