"""Devices, meshes and processes: the placement of arrays and the coordination of the processes of a run."""
