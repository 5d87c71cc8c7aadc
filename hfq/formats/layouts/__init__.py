"""Tensor layouts that several formats share."""
