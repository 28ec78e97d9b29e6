"""torchao.prototype.parq: training whose weights move gradually onto a quantization grid."""
