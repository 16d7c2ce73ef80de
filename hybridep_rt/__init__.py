"""HybridEP runtime: train Mixture-of-Experts models across datacenters joined by slow links."""
