"""torchao.prototype.mx_formats: OCP MX and NVFP4, over our formats, specs and recipes."""
