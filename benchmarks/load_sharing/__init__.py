"""What replicas that read a part of the weights each save of a load, and what the exchange costs."""
