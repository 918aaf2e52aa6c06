"""The devices of a world: `devices` chooses a worker's, `nccl` reduces tensors that are on GPUs."""
