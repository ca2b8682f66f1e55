"""Names of torch, Lightning and torchmetrics that are private, each with the reason why nothing public does."""
