"""What both worker kinds share: specs, weights, the decoder, sampler, block pool, scheduler, step loop, backends."""
