"""The path of a GPU host. Written and tested on CPU tensors; nothing of it has run on a GPU yet.

D keeps the KV pool in pinned host memory, where P writes to it and CPU threads place what is
fetched and filled; a kernel reads the same bytes through their device address. Selection, split,
gather and attention run on the device; the host decides what is local, sends the fetches and waits
for them.
P copies each layer to its pinned store on a side stream. `device_path` switches all of it on;
docs/gpu-status.md lists what only a GPU can show.
"""
