"""Estimators and models for Spark ML."""
