//! Options of pruning methods and refinements.
//!
//! A method declares its options as constants in its own file ([`MethodOption`]) and lists them. The command line makes a flag of each,
//! and [`MethodOptions`] holds the values that a user has set.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::failure::Failure;

/// An option of a method or a refinement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MethodOption {
    /// The name in records. The flag has dashes in place of underscores.
    pub name: &'static str,
    /// A word for the value in the help text.
    pub value_name: &'static str,
    /// The help text, without the default.
    pub help: &'static str,
    /// The value of a run that does not set the option. It also decides the type.
    pub default: OptionValue,
    /// The smallest number.
    pub least: u8,
}

/// The value of an option.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub enum OptionValue {
    /// A finite number.
    Number(f64),
    /// A whole number.
    Count(usize),
    /// A flag without a value.
    Switch(bool),
}

impl MethodOption {
    /// The flag.
    pub fn flag(&self) -> String {
        format!("--{}", self.name.replace('_', "-"))
    }

    /// Checks that a value is a number from [`least`](Self::least) on.
    ///
    /// # Errors
    /// Fails with the flag.
    fn check(&self, value: OptionValue) -> Result<(), Failure> {
        let (value, default) = match (value, self.default) {
            (OptionValue::Number(value), OptionValue::Number(default)) => (value, default),
            (OptionValue::Count(value), OptionValue::Count(default)) => {
                (value as f64, default as f64)
            }
            _ => return Ok(()),
        };
        let least = f64::from(self.least);
        if value.is_finite() && value >= least {
            return Ok(());
        }
        Err(Failure::usage(format!("{} is {value}", self.flag()))
            .hint(format!("use a number from {least} on, like {default}")))
    }
}

/// The options that are set, by name. All others have their defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct MethodOptions(BTreeMap<&'static str, OptionValue>);

impl MethodOptions {
    /// No option is set.
    pub const DEFAULT: Self = Self(BTreeMap::new());

    /// Sets an option to a value of its type.
    #[must_use]
    pub fn with(mut self, option: &MethodOption, value: OptionValue) -> Self {
        self.0.insert(option.name, value);
        self
    }

    /// The value of an option, its default if it is not set.
    fn value(&self, option: &MethodOption) -> OptionValue {
        self.0.get(option.name).copied().unwrap_or(option.default)
    }

    /// The value of a number; 0 for an option of a different type.
    pub fn number(&self, option: &MethodOption) -> f64 {
        match self.value(option) {
            OptionValue::Number(value) => value,
            _ => 0.0,
        }
    }

    /// The value of a whole number; 0 for an option of a different type.
    pub fn count(&self, option: &MethodOption) -> usize {
        match self.value(option) {
            OptionValue::Count(value) => value,
            _ => 0,
        }
    }

    /// Returns whether a switch is set.
    pub fn is_set(&self, option: &MethodOption) -> bool {
        self.value(option) == OptionValue::Switch(true)
    }

    /// The options among `read`.
    #[must_use]
    pub fn only(mut self, read: &[MethodOption]) -> Self {
        self.0.retain(|name, _| read.iter().any(|option| option.name == *name));
        self
    }

    /// Checks the values, and that `read` names every option that is set.
    ///
    /// # Errors
    /// Fails with the flag, for `method` in its message.
    pub fn check(&self, method: &str, read: &[MethodOption]) -> Result<(), Failure> {
        for (name, value) in &self.0 {
            let Some(option) = read.iter().find(|option| option.name == *name) else {
                let flag = format!("--{}", name.replace('_', "-"));
                return Err(Failure::usage(format!("{method} does not read {flag}")).hint(
                    format!("leave {flag} out, or choose another --prune-method or --refine"),
                ));
            };
            option.check(*value)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::methods::sparsegpt::{BLOCKSIZE, PERCDAMP};
    use super::super::refinements::dsnot::{DSNOT_CYCLES, DSNOT_MLP};
    use super::*;

    #[test]
    fn options_have_their_defaults_until_they_are_set() {
        let given = MethodOptions::DEFAULT
            .with(&BLOCKSIZE, OptionValue::Count(64))
            .with(&DSNOT_MLP, OptionValue::Switch(true));
        assert_eq!((given.count(&BLOCKSIZE), given.number(&PERCDAMP)), (64, 0.01));
        assert!(given.is_set(&DSNOT_MLP) && !MethodOptions::DEFAULT.is_set(&DSNOT_MLP));
        let json = serde_json::to_string(&given).unwrap();
        assert_eq!(json, r#"{"blocksize":64,"dsnot_mlp":true}"#);
        assert_eq!(given.only(&[DSNOT_MLP, DSNOT_CYCLES]).0.len(), 1);
    }

    #[test]
    fn options_that_are_out_of_range_or_not_read_are_refused() {
        let refused = |option: &MethodOption, value| {
            let given = MethodOptions::DEFAULT.with(option, value);
            given.check("sparsegpt", &[PERCDAMP, BLOCKSIZE]).unwrap_err().message
        };
        assert_eq!(refused(&BLOCKSIZE, OptionValue::Count(0)), "--blocksize is 0");
        assert_eq!(refused(&PERCDAMP, OptionValue::Number(-0.5)), "--percdamp is -0.5");
        assert_eq!(refused(&PERCDAMP, OptionValue::Number(f64::NAN)), "--percdamp is NaN");
        let unread = refused(&DSNOT_CYCLES, OptionValue::Count(1));
        assert_eq!(unread, "sparsegpt does not read --dsnot-cycles");
    }
}
