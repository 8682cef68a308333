"""Tests that come with a contract: whoever implements it derives a class, and pytest collects what it must keep."""
