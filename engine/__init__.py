"""What both worker kinds share: model specs, weights, the decoder, sampler, block pool, scheduler, step loop, backends."""
