"""A training script for `horovodrun` with a host discovery script (Horovod Elastic); see README.md for Horovod."""

import sys

import horovod.torch
from _peer_training import train_elastically

if __name__ == "__main__":
    train_elastically(horovod.torch, sys.argv[1])
