//! Enums whose values have names in the interfaces.

/// An enum with its names: `Variant = code => "name",`. The code is that of the order by default.
#[macro_export]
macro_rules! named {
    (
        $(#[$about:meta])*
        $Enum:ident {
            $($(#[$doc:meta])* $Variant:ident $(= $code:literal)? => $name:literal,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $Enum {
            $($(#[$doc])* $Variant $(= $code)?,)*
        }

        impl $Enum {
            /// Every value with its name, in the order of the codes.
            pub const NAMES: [(&'static str, $Enum); [$($name),*].len()] =
                [$(($name, $Enum::$Variant)),*];
        }
    };
}
pub use named;
