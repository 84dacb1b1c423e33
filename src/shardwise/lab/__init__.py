"""Several hosts on one machine: network namespaces behind a switch whose ports have bandwidth, latency and loss.

`link` is one port's numbers, `network` makes and removes namespaces, `relay` delays and drops frames where the kernel
cannot, `job` runs a command on the hosts. Linux only, as root, with `ip` and `tc` of iproute2. Imports no torch.
"""
