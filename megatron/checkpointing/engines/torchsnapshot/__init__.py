"""Engine `torchsnapshot`: TorchSnapshot's asynchronous take."""
