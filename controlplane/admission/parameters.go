package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/reservedfor"
)

// Parameters is the webhook for the driver's parameters in claims, templates and
// DeviceClasses. What the node would refuse for every device is refused here, by
// the same code; what depends on the device that the claim gets, only there.
type Parameters struct {
	Driver string
}

// configured is what claims, templates and classes have in common, at whichever
// depth.
type configured struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		Devices resourceapi.DeviceClaim `json:"devices"` // a claim
		Spec    struct {
			Devices resourceapi.DeviceClaim `json:"devices"`
		} `json:"spec"` // a template
		Config []resourceapi.DeviceClassConfiguration `json:"config"` // a class
	} `json:"spec"`
	Status struct {
		ReservedFor []resourceapi.ResourceClaimConsumerReference `json:"reservedFor"`
	} `json:"status"`
}

// checkHolder keeps the name of who holds a claim while it does.
func checkHolder(old, now *configured) field.ErrorList {
	before, after := old.Metadata.Annotations[scheduling.ReservedForAnnotation], now.Metadata.Annotations[scheduling.ReservedForAnnotation]
	if before == after || !reservedfor.IsHeldBy(before, old.Status.ReservedFor) {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("metadata", "annotations").Key(scheduling.ReservedForAnnotation),
		fmt.Sprintf("%s holds the claim: the annotation can be changed when that is deleted", before))}
}

// Handle implements admission.Handler.
func (p *Parameters) Handle(_ context.Context, req admission.Request) admission.Response {
	var object configured
	if err := json.Unmarshal(req.Object.Raw, &object); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	errs := p.check(&object)
	if len(req.OldObject.Raw) > 0 {
		var old configured
		if err := json.Unmarshal(req.OldObject.Raw, &old); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
		errs = append(errs, checkHolder(&old, &object)...)
	}
	if err := errs.ToAggregate(); err != nil {
		return admission.Denied(err.Error())
	}
	return admission.Allowed("")
}

func (p *Parameters) check(o *configured) (errs field.ErrorList) {
	if value, ok := o.Metadata.Annotations[scheduling.ReservedForAnnotation]; ok {
		if _, err := reservedfor.Parse(value); err != nil {
			errs = append(errs, field.Invalid(field.NewPath("metadata", "annotations").Key(scheduling.ReservedForAnnotation), value, err.Error()))
		}
	}
	spec := field.NewPath("spec")
	errs = append(errs, p.checkClaim(o.Spec.Devices.Config, spec.Child("devices", "config"))...)
	errs = append(errs, p.checkClaim(o.Spec.Spec.Devices.Config, spec.Child("spec", "devices", "config"))...)
	for i, c := range o.Spec.Config {
		errs = append(errs, p.checkOpaque(c.Opaque, spec.Child("config").Index(i))...)
	}
	return errs
}

func (p *Parameters) checkClaim(config []resourceapi.DeviceClaimConfiguration, at *field.Path) (errs field.ErrorList) {
	for i, c := range config {
		errs = append(errs, p.checkOpaque(c.Opaque, at.Index(i))...)
	}
	return errs
}

func (p *Parameters) checkOpaque(opaque *resourceapi.OpaqueDeviceConfiguration, at *field.Path) field.ErrorList {
	if opaque == nil || opaque.Driver != p.Driver {
		return nil
	}
	if err := v1alpha1.Check(opaque.Parameters.Raw); err != nil {
		// The errors name the field and the value below this.
		return field.ErrorList{{Type: field.ErrorTypeForbidden, Field: at.Child("opaque", "parameters").String(), Detail: strings.TrimSpace(err.Error())}}
	}
	return nil
}
