"""Here so that the tests can import `finetune_lora`."""
