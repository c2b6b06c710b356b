"""SecAgg+ (Bell et al., CCS 2020): graph of neighbors, secret sharing, masks and quantization.

Wire format and field are those of Flower 1.41, see `fedssl.wire.secure_aggregation`.
"""
