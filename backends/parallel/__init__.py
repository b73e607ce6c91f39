"""One model on several ranks: divided by tensors and by layers, over torch.distributed."""
