"""Expert parallelism: the way of tokens between ranks, and the loads of experts."""
