"""One math thread for every test: bits of the reference ops depend on the thread count (see load_ops), and cores are few."""

import torch

torch.set_num_threads(1)
