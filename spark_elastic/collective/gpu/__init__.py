"""The devices of a world: `devices` and `leases` choose a worker's, `nccl` reduces tensors that are on GPUs."""
