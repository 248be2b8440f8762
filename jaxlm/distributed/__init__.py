"""Devices, meshes and processes: where arrays live and how the processes of a run act as one."""
