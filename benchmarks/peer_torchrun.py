"""A training script for torchrun, as its documentation advises: checkpoints in files, read again after a restart."""

import sys

from _peer_training import train_with_files

if __name__ == "__main__":
    train_with_files(sys.argv[1])
